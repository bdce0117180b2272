"""What is replaced stays replaced, once."""

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

        @staticmethod
        def static():
            return 3

    return Owner


def doubled(function):
    return lambda *args: 2 * function(*args)


def patches(owner):
    return Patches([Patch(owner, "own", doubled), Patch(owner, "inherited", doubled)])


def test_they_are_put_once(owner):
    made = patches(owner)
    assert (owner().own(), owner().inherited()) == (2, 1)
    for _ in range(3):
        made.put()
        assert (owner().own(), owner().inherited()) == (4, 2)
    assert Base().inherited() == 1


def test_what_others_put_on_top_stays(owner):
    """As of a library that wraps `DistributedDataParallel.__init__` inside a block."""
    made = patches(owner)
    made.put()
    below = owner.own
    owner.own = lambda self: below(self) + 1
    made.put()
    assert owner().own() == 5


def test_what_is_added_is_put_with_the_others(owner):
    made = Patches([])
    made.add([Patch(owner, "own", doubled)])
    assert owner().own() == 2
    made.put()
    made.add([Patch(owner, "inherited", doubled)])
    assert (owner().own(), owner().inherited()) == (4, 2)
