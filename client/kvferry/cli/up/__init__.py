"""`kvferry up`: a whole cluster on one machine, as child processes of one command."""
