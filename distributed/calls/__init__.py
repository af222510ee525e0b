"""Remote calls: sessions, messages, the two sides of a call, futures and autograd contexts. All use of torch's RPC."""
