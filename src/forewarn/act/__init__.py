"""Actions that change a training run. No other module does, and these only at the user's request."""
