"""What is replaced is put back as it was; in a loop it stays, and asks whether it is wanted."""

import pytest

from lazy_tensor.dispatch.patches import Patch, Patches


class Base:
    def inherited(self):
        return 1


@pytest.fixture
def owner():
    class Owner(Base):
        def own(self):
            return 2

    return Owner


def doubled(function):
    return lambda *args: 2 * function(*args)


def patches(owner):
    return Patches([Patch(owner, "own", doubled), Patch(owner, "inherited", doubled)])


def test_what_is_replaced_is_put_back(owner):
    own, made = owner.own, patches(owner)
    made.put()
    made.put()
    assert (owner().own(), owner().inherited()) == (4, 2)
    made.take_back()
    assert owner().own() == 4
    made.take_back()
    assert owner.own is own
    assert "inherited" not in vars(owner)


def test_what_is_wanted_again_stays(owner):
    made = patches(owner)
    for _ in range(3):
        made.put()
        assert (owner().own(), owner().inherited()) == (4, 2)
        made.take_back()
    assert (owner().own(), owner().inherited()) == (4, 2)


def test_a_patch_that_others_put_on_top_stays(owner):
    """As of a library that wraps `DistributedDataParallel.__init__` inside a block."""
    made = patches(owner)
    made.put()
    below = owner.own
    owner.own = lambda self: below(self) + 1
    made.take_back()
    assert owner().own() == 5
    assert "inherited" not in vars(owner)
    made.put()
    assert (owner().own(), owner().inherited()) == (5, 2)
