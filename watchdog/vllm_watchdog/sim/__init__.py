"""A stand-in for `vllm serve`: a real program with vLLM 0.32's processes, log lines, endpoints, metrics and exit codes.

For the demo, the drills and the tests: no model, no GPU, standard library only, ready within a third of a second.

    python -m vllm_watchdog.sim [serve] [MODEL] --port P --max-num-seqs N … --sim-…

Processes: the API server (`vllm`), its child `VLLM::EngineCore`, and `VLLM::Worker_TPn` with --tensor-parallel-size 2.
Every completion goes through EngineCore, so a stopped EngineCore hangs completions while /health says 200, and a killed
API server leaves an orphan. As with setproctitle, the environment of EngineCore and of the workers can't be read from
outside unless SPT_NOENV is set.

Faults are flags (`--sim-oom-over-tokens`, `--sim-hang-after-s`, `--sim-fail-start`, …; `--help` lists them all, the
table is `faults.Sim`) or are switched at run time: `POST /sim/fault {"name": "hang"}` from loopback (`RUNTIME_FAULTS`).

With LLM_WATCHDOG_SIM_GPU=FOLDER every process that would hold GPU memory writes `FOLDER/PID.json`
(`{"pid", "gpu", "used_bytes"}`) while it lives; `FOLDER/gpu.json` holds `{"total_bytes"}`. See `vram`.
"""
