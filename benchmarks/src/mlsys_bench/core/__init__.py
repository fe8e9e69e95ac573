"""The core by itself: serving loop, recorder, memory plans, the front of the Open Inference Protocol."""
