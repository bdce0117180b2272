"""A flush: a plan is found and run, and each value gets its data, or the exception.

Read `flush` first. `plan_cache` has the plan, `compile_service` what compiles, `failure` what is
left to do after an exception. `watch` and `input_snapshots` see to memory that others write, `tape`
to what `replay` must know, `profiling` and `debug_view` to who looks on. `aside` computes a value
before the rest; `hits` loads the C++ that records.
"""
