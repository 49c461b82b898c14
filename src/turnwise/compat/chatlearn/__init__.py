"""ChatLearn: its files of models and pipelines, with its names of keys."""
