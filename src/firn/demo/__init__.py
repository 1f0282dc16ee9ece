"""The built-in models, the sessions they were made for, and the demo that shows them."""
