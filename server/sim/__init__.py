"""The server in virtual time: a loop whose clock jumps, transports that delay, hang and die by a seed, and a trace."""
