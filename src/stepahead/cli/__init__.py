"""The commands.  `--help` loads `main` alone; each verb loads what it needs when it runs."""
