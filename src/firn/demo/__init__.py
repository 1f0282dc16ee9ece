"""The built-in models, the sessions they were trained for, and a demo of both."""
