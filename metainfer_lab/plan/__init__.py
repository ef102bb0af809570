"""What a spec comes to on its machine: numbers and floors, or refusals that name the field.

case.py      a spec with its model, machine and deployment loaded: what the checks look at
checks.py    everything that cannot be, each with the field, the reason and what would do
result.py    Plan: the numbers, the floors term by term
resolve.py   plan(): from a spec or a config.json to a Plan, or Refused
"""

from metainfer_lab.plan.case import Case, Finding
from metainfer_lab.plan.checks import refusals, warnings
from metainfer_lab.plan.resolve import Refused, plan
from metainfer_lab.plan.result import Plan

__all__ = ["Case", "Finding", "Plan", "Refused", "plan", "refusals", "warnings"]
