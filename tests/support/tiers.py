"""Which tests the plain command `pytest` leaves out, and which CI runs with one pair of Python and JAX alone.

The one place that says so. Patterns are regular expressions that match the beginning of a test's id below tests/.
"""

import functools
import re

import pytest

# The selections of CI's invocations. Together they run every test: test_tiers.py.
PLAIN = "not full"  # the README's command, with the oldest pair; the other two run each test once, in another order
OLDEST = "one_pair"
NEWEST = "not one_pair"

MARKERS = {
    "full": "left out of the plain command, whose tests are something of every feature; CI runs it",
    "one_pair": "does not depend on JAX's version; CI runs it with the oldest pair alone",
}

FULL = [
    # Without vma a test takes the same steps: "no_vma" in its id.
    r".*\[(.*-)?no_vma",
    # Products of options, dtypes, sizes and seeds: keep some of each.
    r"collectives/test_options.py::test_ring_order\[(?!float32-[358]|bfloat16-4|int32-8)",
    r"collectives/test_exchange.py::(?!test_matches_lax|test_permutations_match_lax|test_errors)",
    r"family/test_family_values.py::test_bits_of_wide_types\[(?!psum|all_gather\])",
    r"family/test_family_grad.py::test_(second_derivatives|gradient_from_outside)",
    r"family/test_family_trees.py::test_(one_call_for_each_dtype|the_hlo_names)",
    r"random_programs/test_random_programs.py::(?!.*\[(904|178)\]|test_programs_of_a_seed)",
    "zero/test_zero_any_ranks",
    "zero/test_zero_replicated.py::test_the_bits",
    r"zero/test_zero_stage_3_parameter.py::test_(goes_on|the_bits|lamb.*lax)",
    r"zero/test_zero_stage_3.py::test_(bits|goes_on|integers|layers|gradients_of_layers|rank_order\[lax)",
    "zero/test_zero_wires.py::test_bits",
    r"zero/test_zero_explicit_mesh.py::test_as_with.*\[.*(4|jit)\]",
    "training/test_audit.py::test_(training_has|with_other|steps_keep|results_have|ten_thousand|who_of|a_constant)",
    "training/test_same_bits.py::test_bfloat16",
    "blocks/test_(divisions|any_mesh)",
    r"blocks/test_blocks.py::test_(inside_of_a_loss_with_shards\[vma-2|values_and_derivatives.*\[vma-False|over_several_axes)",
    r"training/test_optax_wrappers.py::test_as_on_one_device\[(?!MultiSteps-True|masked-True|apply_if)",
    r"zero/test_zero_parameter.py::test_updates_match_the_unsharded_optimizer\[.*(lamb|lars|tree|labels|rms|noise|s|muon|adafactor|schedule|step)\]",
    r"transformations/test_remat.py::.*\[vma-(?!default|everything|dots|only_names|offload\])",
    r"transformations/test_vmap.py::test_in_and_out_axes\[vma-(?!0-0|1--1|0-\(2|1-\(N)",
    r"tree/test_tree_values.py::test_all_sums_on_any_number_of_ranks\[(?!.*(1|3|8)\])",
    r"family/test_family_groups.py::test_matches_lax\[(all|halves|pairs)",
    r"family/test_family_vmap.py::test_gradient_over_the_batch\[(?!psum\]|all_to_all\]|all_gather_last)",
    r"replicas/test_sentinel.py::test_a_step_that_donates.*\[(?!zero|gradients)",
    "programs/test_benchmarks.py::test_(interval_covers_the_ratio|memory_at_rest|results_have|compare_of|costs_of)",
    "programs/test_tables.py::test_published",
    "zero/test_zero_refused.py::test_(what_is_not|settings|the_backend_is_not_started)",
    r"zero/test_zero_norm.py::test_the_norm_.*\[(?!.*float32)",
    "training/test_gradients.py::test_(optax_is_needed|the_norm_of_the_mean)",
    "collectives/test_arguments.py::test_checks_do_not_start_the_backend",
    r"family/test_family_vmap.py::test_batch_of_calls\[(?!vma-0-0)",
    "override/test_(override_family|training_script)",
    r"partitioner/test_partitioned_values.py::test_all_forms_of_collectives\[(?!float32)",
    "partitioner/test_(random_jit|jit_programs)",
    "partitioner/test_programs.py::test_the_bits_of_xla",
    "partitioner/test_partitioner_processes.py::(?!test_same_bits)",
    r"partitioner/test_buffers_in_place.py::.*\[(?!a step)",
    r"partitioner/test_override_order.py::test_bits_of_ring_psum\[(?!.*tree)",
    "partitioner/test_partitioner_hosts.py",
    "partitioner/test_partitioner_option.py::test_(a_program_that_is_not_edited|the_persistent_cache|the_variable)",
    r"engine/test_deadline.py::test_(names_the_threads|what_is_in_flight|default_deadline|a_callback.*\[(?!io))",
    "family/test_family_errors.py::test_a_missing_rank_is_named",
    r"zero/test_zero_unsharded.py::test_(has_the_bits.*\[(?!schedule-free-options0|.*options3)|lookahead)",
    r"lowering/test_reference_cycles.py::test_no_module.*\[(?!.*(psum|scan))",
    r"engine/test_deadline.py::test_(ranks_of_a_failed_call|the_failure_as_fields)",
    "multiprocess/test_forks.py::test_(the_job_goes_on|a_child_that_is_forked)",
    "replicas/test_replicas.py::test_copies_of_other_processes",
    "launcher/test_launch.py::test_(initialize_without|a_handler_of_sigterm)",
    "launcher/test_launch_members.py::test_(only_the_time_since|one_that_dies_before|a_stopped_member_that_nobody)",
    "launcher/test_launch_restarts.py::test_the_death_of",
    "launcher/test_launch_watch.py::test_(ranks|a_program|processes_of)",
    "watch/test_watch.py::test_no_false_alarm",
    "launcher/test_elastic_hosts.py::test_(a_stopped|one_of_two)",
    "launcher/test_schedulers.py",
    "inspect/test_flight_recorder.py::test_it_can_be_turned_off",
    "cuda/test_gpu_check.py::test_a_part_that_hangs",
    "lowering/test_barrier.py::test_(groups_may_make|programs_that_depend)",
    "override/test_override.py::test_(concurrent_lowerings|a_missing_rank_is_named)",
    r"lowering/test_(combiner.py::test_random_programs|equations.py::test_random_programs\[(?!0))",
    "collectives/test_ragged.py::test_derivatives",
    "zero/test_zero_parameter.py::test_(state_of_another_number|two_norms|two_axes)",
    r"zero/test_zero.py::test_restored_on_another_number_of_devices\[8",
    r"family/test_family_vmap.py::test_over_the_batch\[(?!.*(psum|all_gather|all_to_all))",
    "training/test_summed_once.py::test_differentiated_outside",
    "wire/test_int8.py::test_vmap_over_another_axis",
    r"training/test_models.py::test_the_mean_over_tokens_and.*\[(?!2)",
    r"lowering/test_export.py::test_symbolic_shapes\[(?!psum-True|psum_scatter-False|all_gather, two)",
    r"zero/test_zero_parameter.py::test_any_number_of_ranks\[(?!8-1-ring)",
    r"replicas/test_sentinel.py::test_optimizers_compare_every_n_steps\[(?!tree|zero)",
    r"tree/test_tree_across_hosts.py::(?!.*consecutive|test_groups_that_lie.*\[i\])",
    "engine/test_concurrency.py::test_(ten_thousand|hundreds)",
    "engine/test_pauses.py",
    # Jobs of several processes, each with its own compilation. Keep one of each kind.
    "multiprocess/test_(same_host|gpu_lowering|soak|process_discovery)",
    "multiprocess/test_failures.py::test_(mismatched|equal)",
    "multiprocess/test_flight_of_processes",
    "multiprocess/test_leaving.py::test_(threads|leaving_processes)",
    "multiprocess/test_tree.py::(?!test_one_process)",
    "multiprocess/test_shared_memory.py::test_(all_hear|memory_grows)",
    "between_hosts/test_(narrow_wires|int8_across_hosts|more_hosts)",
    "between_hosts/test_two_level.py::(?!test_two_hosts$)",
    "between_hosts/test_between_hosts_family.py",
    "between_hosts/test_between_hosts.py::test_(xla_gets|a_host_that_does_not)",
    "training/test_buckets.py::test_processes",
    "meshes/test_partial_manual.py::test_the_persistent_cache",
    "elastic/test_elastic.py::(?!test_rank_0)",
    "replicas/test_sentinel.py::test_all_ranks_of_all_processes",
    "package/test_pytest_plugin.py::test_(lax_is_replaced|the_body_runs|the_rank_that|faults|stops_and_delays|hangs|stacks)",
    "package/test_tiers.py::test_which_tests_a_command_runs",
    "chaos/test_(scenarios.py::test_scenario|hosts_come_and_go)",
    # Programs in processes of their own, compiled with LLVM's optimizations.
    "programs/test_example.py",
    "programs/test_benchmarks.py::test_(against|allreduce|loops|lowering|peers|picture|processes|reduction|scaling|train|wire)",
    "programs/test_any_number_of_devices.py::test_the",
    "package/test_typing.py::test_mypy",
    r"package/test_source_tree.py::test_(from_the_root|native_tests|a_stale_native_module.*\[(add|rename))",
    "package/test_main.py::test_active_options",
    "package/test_package.py::test_(every|the_widest)_instruction_set",
    "lowering/test_tuning.py::test_(the_benchmark|environment_variable)",
    "collectives/test_options.py::test_(not_strict|strict_is_0_or_1)",
    r"engine/test_deadline.py::test_(names_all|names_the_group|other_programs|repeated|a_deadline)",
    # Loops over numbers of ranks, and pictures.
    r"schedule/test_schedule.py::.*\[(?!(1|2|3|5|8|12|17)\])",
    r"tree/test_shard_tree.py::.*\[(?!(1|2|3|6|8|24|64)\])",
    r"schedule/test_pictures.py::test_(the_animation|maps_and_curves|diagrams\[(?!ring\]))",
    r"docs/test_docs.py::test_code_runs\[docs/(?!replacing_psum)",
]

# Without vma, with one pair.
_ON_TOP = "family|gradients|int8|sentinel|optax|buckets|training|zero|wire|the_fold|partial_sums|documented"

ONE_PAIR = [
    # The values of the family cover all of its code.
    "family/(?!test_family_values)",
    # Training is plain JAX on top of the collectives, and these are tested with and without vma.
    f"(?=.*no_vma)(?!family/test_family_values).*({_ON_TOP})",
    # The layouts of ZeRO on any number of ranks are plain JAX on code that the other ZeRO tests cover.
    "zero/test_zero_(any_ranks|parameter|norm|trees)",
    # The bits of other numbers of ranks run with the newest pair.
    r"zero/test_zero_replicated.py::.*\[some",
    r"zero/test_zero_stage_3_parameter.py::test_the_bits.*\[3-",
    # Audits, wire values, weighted means and replica comparisons are plain JAX, too. Some of each run both ways.
    r"training/test_audit.py::(?!test_(a_flipped_bit.*\[.*4-0|only_each|results.*\[vma-2|all_ranks))",
    "zero/test_zero_wires.py::test_bits",
    r"wire/test_int8.py::(?!test_(sum\[|value_and_grad|in_a_scan|vmap|pmap|derivatives|explain|optax_state))",
    "wire/test_wire.py::(?!test_(a_mean_in_range|dtypes_are_kept|feedback_in_optax))",
    "training/test_weighted_pmean.py::(?!test_(the_documented|the_gradient|a_mean_over_no_examples))",
    "replicas/test_sentinel.py::(?!test_(a_flipped_bit|a_step_that_donates|all_ranks))",
    # Of what the plain command runs: its other cases, or others of the same code, run with the newest pair.
    "training/test_(strict_promotion|integer_params|optax_wrappers)",
    "training/test_same_bits.py::test_float32",
    "training/test_gradients.py::(?!test_(is_the|already|with_a_model|plain_jax|reduced_in|reduced_under|reductions))",
    "training/test_summed_once.py::(?!test_(summing|without|over_a|differentiated|forward|the_gradient|a_sum))",
    "training/test_other_axes.py::(?!test_value_and_gradients)",
    "training/test_accumulation.py::(?!test_(jitted_or|the_mean_over_all))",
    "training/test_shards.py::(?!test_(is_the|forward|checkpoints|auxiliary|operations|integer|shard_index|a_loss))",
    r"zero/test_zero_explicit_mesh.py::test_as_with.*\[(?!.*(4|jit)\])",
    "zero/test_zero.py::test_(updates|stages)",
    "zero/test_zero_wires.py::test_(parameters|gradients)_are_rounded",
    r"zero/test_zero_unsharded.py::test_has_the_bits.*\[(schedule-free-options0|.*options3)",
    "zero/test_zero_stage_3.py::test_(the_bits_of_stage_2|copies|stacked)",
    "blocks/test_blocks.py::(?!.*no_vma)test_(values_and_derivatives.*True|trees|a_checkpoint)",
    "collectives/test_(values|trees)",
    "meshes/test_groups.py::(?!test_matches_lax)",
    "collectives/test_small_integers.py::(?!.*no_vma)",
    "collectives/test_options.py::test_(no_algorithm|any_order|ring_order_of)",
    "watch/test_watch.py::test_a_step_that_hangs",
    "elastic/test_elastic.py::test_rank_0",
    "package/test_main.py::test_ranks_are_spread",
    # The benchmarks and most examples add no new calls.
    ".*(ten_steps|train_gpt|micro_batches|the_example)",
    "programs/test_(benchmarks|example|tables).py",
    # The choice of kernels per processor is native code, and the selection of tests is pytest's.
    "package/test_package.py::test_(every_instruction_set|the_widest_instruction_set|an_unknown_instruction_set)",
    "package/test_tiers.py::test_which_tests_a_command_runs",
    # Pages, messages, refused arguments, the source tree and its tables do not depend on the version.
    "docs/",
    "schedule/",
    "tree/test_shard_tree.py",
    "package/test_(source_tree|typing|native_layout).py",
    "lowering/test_tuning.py",
    "collectives/test_arguments.py",
    # Folds, shared memory, the record, deadlines and the launcher are native code and Python's. Joining, discovery,
    # lowering and leaving are JAX's. Processes that leave meet the same errors as processes that fail.
    r"collectives/test_options.py::test_ring_order\[",
    "collectives/test_dtypes.py::test_the_fold",
    "multiprocess/test_(soak|tree|shared_memory|flight_of_processes|harness|failures).py",
    "between_hosts/test_(int8_across_hosts|two_level|more_hosts|parts_across_hosts).py",
    # Two hosts ask XLA for each of its steps. More hosts or processes only change the tables of the same steps.
    "between_hosts/test_between_hosts_family.py::(?!test_two_hosts)",
    # One reason stands for all: a process publishes text in JAX's service.
    r"multiprocess/test_gpu_lowering.py::test_all_processes_fall_back_for_the_same_reason\[(?!one GPU)",
    # Two processes on this host cover it.
    r"multiprocess/test_same_host.py::test_same_bits_as_one_process\[4",
    "chaos/",
    "launcher/(?!test_launch_watch.py::test_a_program|test_worker)",  # executions are JAX's, and __main__ is Python's
    "watch/test_comparison",
    "tree/test_tree_values.py",
    "engine/test_(deadline|pauses).py",
    "inspect/test_flight_recorder.py",
    # The plugin's ranks run and join. Its reports of failures and faults are pytest's.
    "package/test_pytest_plugin.py::test_(the_rank_that_failed|hangs_and_exits|stacks|faults|stops_and_delays)",
    # Single calls, calls in loops, beside others and recorded go through XLA's passes. The rest follows.
    "gpu_topologies/test_topology_(?!family|jit|overlap|recorded)",
]


# The ids of a session's tests before selection.
ALL_IDS = pytest.StashKey[list[str]]()


def below_tests(nodeid: str) -> str:
    """The id as patterns have it: that of pytest begins at the root, or at a parent of it."""
    return nodeid[nodeid.find("tests/") + len("tests/") :]


@functools.cache
def _pattern(marker: str) -> re.Pattern:
    return re.compile("|".join({"full": FULL, "one_pair": ONE_PAIR}[marker]))


def markers_of(nodeid: str) -> list[str]:
    """The markers of a test."""
    return [marker for marker in MARKERS if _pattern(marker).match(below_tests(nodeid))]


def selects(expression: str, nodeid: str) -> bool:
    """Whether `pytest -m expression` runs a test."""
    markers = markers_of(nodeid)
    return bool(eval(expression, {}, {marker: marker in markers for marker in MARKERS}))
