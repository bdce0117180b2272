"""From an aten op to a kernel call: record, plan, flush. Private; `lazy_tensor` is the facade."""
