"""What distinguishes the points of a folder."""

from dynabench.arm import Arm, Settings
from dynabench.deployment.description import Deployment, Pool
from dynabench.experiment.store import key_of


def test_a_point_is_known_by_what_was_changed_and_not_by_its_order_or_the_name_of_its_arm():
    settings = Settings(Deployment(pools=(Pool(),)))
    one = Arm("one", settings, {"router_mode": "kv", "workers": 2})
    same = Arm("other", settings, {"workers": 2, "router_mode": "kv"})
    assert key_of(one) == key_of(same) != key_of(Arm("one", settings, {"router_mode": "kv", "workers": 3}))
