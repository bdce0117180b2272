"""The private names of torch that `dispatch` and `lazy_tensor` need, each behind a name of ours.

Each module is for one subject; others import the names from here. Only this package, and
`lazy_tensor.interop.torch_ways` for what is replaced, may use `torch._C` or a name of torch with an
underscore in front. (An `OpOverload`'s `_op` and `_schema` are excepted.) So what a new torch
breaks is found here. `torch_checks.names` lists the names. With a torch that lacks one nothing is
recorded, and this package isn't imported. Tested on torch 2.13.
"""

from lazy_tensor.dispatch.torch_private.autograd import (
    differentiated as differentiated,
    in_backward as in_backward,
    keeps_tensors as keeps_tensors,
    let_engine_have_threads as let_engine_have_threads,
    next_sequence_number as next_sequence_number,
    saves_by_hooks as saves_by_hooks,
    views_by_their_ops as views_by_their_ops,
)
from lazy_tensor.dispatch.torch_private.compilers import (
    hide_from_dynamo as hide_from_dynamo,
    import_for_subclasses as import_for_subclasses,
    is_flat_list as is_flat_list,
    is_traced as is_traced,
    script_as as script_as,
)
from lazy_tensor.dispatch.torch_private.dispatcher import (
    KernelsAboveAutograd as KernelsAboveAutograd,
    decompose as decompose,
    has_cpp_meta_kernel as has_cpp_meta_kernel,
    has_meta_kernel as has_meta_kernel,
    has_own_kernel as has_own_kernel,
    is_composite as is_composite,
    is_in_dispatcher as is_in_dispatcher,
    is_structured as is_structured,
)
from lazy_tensor.dispatch.torch_private.environment import (
    ENVIRONMENT_SETTERS as ENVIRONMENT_SETTERS,
    Autocast as Autocast,
    around_environment_changes as around_environment_changes,
    autocast_as as autocast_as,
    autocast_state as autocast_state,
    environment as environment,
    generator_id as generator_id,
    generator_states as generator_states,
    generators_at as generators_at,
)
from lazy_tensor.dispatch.torch_private.memory import (
    CLONES as CLONES,
    fix_memory as fix_memory,
    forget_ended as forget_ended,
    is_part as is_part,
    is_resizable as is_resizable,
    is_shared_by_processes as is_shared_by_processes,
    is_storage_held as is_storage_held,
    is_zero_tensor as is_zero_tensor,
    lazy_clone as lazy_clone,
    n_users as n_users,
    note_in_flight as note_in_flight,
    snapshot as snapshot,
    stop_sharing as stop_sharing,
    storage_id as storage_id,
    storage_of as storage_of,
)
from lazy_tensor.dispatch.torch_private.meta import (
    FAKES as FAKES,
    NoMetaFunction as NoMetaFunction,
    Specs as Specs,
    fake_call as fake_call,
    has_fakes as has_fakes,
    meta_call as meta_call,
)
from lazy_tensor.dispatch.torch_private.modes import (
    KERNEL_KEYS as KERNEL_KEYS,
    RANGE_BEGINS as RANGE_BEGINS,
    RANGE_OPS as RANGE_OPS,
    TorchDispatchMode as TorchDispatchMode,
    are_modes_put_aside as are_modes_put_aside,
    below_autograd as below_autograd,
    is_in_vmap as is_in_vmap,
    is_innermost_mode as is_innermost_mode,
    is_mode_entered as is_mode_entered,
    is_own_mode_entered as is_own_mode_entered,
    is_profiled as is_profiled,
    is_watched as is_watched,
    kernels_only as kernels_only,
    no_dispatch as no_dispatch,
    no_inference as no_inference,
    no_modes as no_modes,
    only_mode_is as only_mode_is,
    outside_vmap as outside_vmap,
    pop_mode as pop_mode,
    push_mode as push_mode,
)
from lazy_tensor.dispatch.torch_private.modules import (
    attributes_kept as attributes_kept,
    call_by as call_by,
    call_module as call_module,
    called_by as called_by,
    detach_computed_weights as detach_computed_weights,
    hooks_of_all_modules as hooks_of_all_modules,
    is_parametrization_cached as is_parametrization_cached,
    without_weak_references as without_weak_references,
)
from lazy_tensor.dispatch.torch_private.optimizers import (
    allow_foreach as allow_foreach,
    is_own_optimizer as is_own_optimizer,
    step_counts_read_by as step_counts_read_by,
)
from lazy_tensor.dispatch.torch_private.tensors import (
    TensorBase as TensorBase,
    become as become,
    copy_of as copy_of,
    count_writes as count_writes,
    disabled_torch_function as disabled_torch_function,
    is_dispatched as is_dispatched,
    make_wrapper as make_wrapper,
    mark as mark,
    new_wrapper as new_wrapper,
    no_memory as no_memory,
    print_width as print_width,
    put_hooks_anew as put_hooks_anew,
    tensor_data as tensor_data,
    values_of as values_of,
    versions_kept as versions_kept,
)
