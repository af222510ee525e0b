"""The engine room of the remote calls: sessions, messages, the meeting of ranks, their launch."""
