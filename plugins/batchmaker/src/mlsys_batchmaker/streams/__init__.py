"""Streams: requests that never end. Frames come as they are spoken, each has an answer, state stays between them."""
