"""Several models behind one address: a front process, and a child process for each loaded model."""
