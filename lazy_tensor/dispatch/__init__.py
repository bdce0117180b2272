"""From an aten op to a kernel call: record, plan, flush. Private; `lazy_tensor` is the facade."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)  # by the folder at the root of a checkout
