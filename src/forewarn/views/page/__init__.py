"""The dashboard's page: its data, its server, and the one-file report made from both."""
