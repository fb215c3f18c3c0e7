# Resume, and reuse records for another model
# ===========================================
#
# A work directory keeps every measurement. Running again with a larger budget goes on where the last run ended, and
# measures nothing twice. A kernel within 5 % of what the machine can do needs no more trials, so a run may end early.

import tempfile
from pathlib import Path

import eqtune

work_dir = Path(tempfile.mkdtemp()) / "work"
first = eqtune.tune_model("zoo:nasrnn", work_dir=work_dir, trials=12, progress=False)
again = eqtune.tune_model("zoo:nasrnn", work_dir=work_dir, trials=80, progress=False)

trials_first = sum(task.trials for task in first.tasks)
trials_again = sum(task.trials for task in again.tasks)
print(f"measured {trials_first} candidates, then {trials_again - trials_first} more")
assert trials_first <= 12
assert trials_first <= trials_again <= 80

# Another model that shares kernels starts from what is known. A kernel is the same when its computation is the same:
# names and the contents of weights do not count. Here the "other model" is NasRNN with other weights.

other = eqtune.tune_model(eqtune.zoo.relax("nasrnn", seed=1), work_dir=work_dir, trials=80, progress=False)
print(f"the other model needed {sum(t.trials for t in other.tasks) - trials_again} new measurements")
assert other.max_rel_error < 1e-4

# What a directory holds, and MetaSchedule's format in both directions:
#   eqtune records list --db WORK_DIR
#   eqtune records export --db WORK_DIR OUT_DIR
