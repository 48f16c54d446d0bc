"""The data plane: one address in front of all engines of the host, a process of its own.

    clients ── downstream ── relay, reply ── upstream ── engines
                                  │
    the daemon's route ── follow ── dispatch (lines, hold) ── deaths (vitals, quarantine) ── report ── the daemon

asyncio on uvloop, one thread.  httptools parses heads; bodies are relayed as they come, their framing only counted.
`routes`, `hold`, `quarantine`, `heads`, `framing` and `errors` are pure.  Nothing here waits for the daemon: without it
the last known route holds.  Start with `app.run(plan)`.
"""
