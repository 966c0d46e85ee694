"""Sessions, registrations and lanes: who is connected, and who maps whose memory."""
