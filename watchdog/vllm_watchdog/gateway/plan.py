"""Where the gateway's modules find their plan; it lives beside the settings, which fill it."""

from vllm_watchdog.gateway_plan import MIB, GatewayPlan

__all__ = ["MIB", "GatewayPlan"]
