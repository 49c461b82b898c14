"""Grade-school word problems (GSM8K), answered with a calculator."""
