"""What the watchdog decides, and nothing else: no clock, no thread, no I/O, no logging.

Events come in as frozen values that carry their time; `world.advance` returns the next world and the commands to carry
out.  So every state can be walked, driven by Hypothesis, and folded again from a journal.
"""
