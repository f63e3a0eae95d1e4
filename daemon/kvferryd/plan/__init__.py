"""The planner: pure functions over manifests and block tables. numpy only, no I/O, no torch.

`plan` intersects a destination manifest with the source ranks' manifests; `bind` binds a plan to two sets of block
tables and a token range. Invariant: every destination element of the token range is written exactly once, from the
right source element, and nothing else is touched. `left` says what of the destination's blocks that leaves.
"""

from kvferryd.plan.bind import Bound, Runs, bind, check_whole
from kvferryd.plan.left import Left, left
from kvferryd.plan.plan import Copy, Plan, plan
from kvferryd.plan.refused import PlanRefused

__all__ = ["Bound", "Copy", "Left", "Plan", "PlanRefused", "Runs", "bind", "check_whole", "left", "plan"]
