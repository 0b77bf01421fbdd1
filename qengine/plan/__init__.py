"""What fits on a card and how fast it would be, from a checkpoint's headers alone. See `qengine plan`."""

from qengine.plan.cards import PlanCard, find_card
from qengine.plan.plan import Plan, PlanOptions, plan_model

__all__ = ["Plan", "PlanCard", "PlanOptions", "find_card", "plan_model"]
