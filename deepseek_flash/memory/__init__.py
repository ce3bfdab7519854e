"""Who holds how many bytes: measured, in this process and on this machine."""
