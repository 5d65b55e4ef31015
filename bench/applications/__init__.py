"""Whole algorithms as their authors write them, plus one line for each part that is jitted.

`python -m bench.applications` runs each with eager, `cgt.jit` and `torch.compile(mode="reduce-overhead")` in the same
places, compares what they end with bit for bit, and takes times from the first step on and in the steady state.

An application is a module with `WHAT`, `STEPS` on each kind of device, and `run(jit, device, steps, tick)`, which calls
`tick()` once a step and returns what there is to compare: name -> tensor or number."""
