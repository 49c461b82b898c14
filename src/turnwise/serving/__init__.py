"""Engines at work: today, engines whose workers live inside actors that also train."""
