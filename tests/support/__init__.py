"""Helpers of several tests: tiny models, inputs, fake servers, and the independent reference."""
