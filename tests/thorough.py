"""Which cases are left to `make thorough`: variants of what a test shows with the cases that are kept here.

CI runs `make test-all`, which has an hour; once a day it runs what this list leaves out as well, with all
examples of Hypothesis. A test that is not listed runs with each of its cases.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

KEPT: dict[str, dict[str, tuple[str, ...]]] = {
    "api/test_schemathesis.py": {"test_every_answer_is_as_declared": ()},
    "browser/test_figures.py": {"test_every_tab_is_drawn": ("money",)},
    "browser/test_report_page.py": {"test_all_plots_are_drawn_without_network_or_error": ("light",)},
    "browser/test_run.py": {"test_every_tab_stands_up": ("profile",)},
    "faults/test_storage_campaign.py": {"test_a_slice_of_the_campaign_finds_nothing": ()},
    "browser/test_newcomer.py": {
        "test_a_newcomer_submits_an_example_watches_it_and_reads_the_answer": (),
    },
    "browser/test_pages.py": {
        "test_every_page_and_dialog_can_be_read_by_everyone_in_firefox": (),
    },
    "cuda_ext/test_encoder_triton.py": {
        "test_no_kernel_spills": ("sm_75", "sm_90"),
    },
    "execution/test_coming_nodes.py": {
        "test_a_waiting_run_brings_a_node_and_the_last_run_lets_it_go": (),
    },
    "execution/test_end_to_end.py": {
        "test_a_run_that_waits_behind_another_experiment_is_queued_and_charged_nothing": (),
        "test_a_run_without_steps_evaluates_the_model_as_it_is": (),
        "test_the_parts_of_a_runs_time_explain_what_the_service_sees": (),
        "test_tpe_suggests_what_is_trained": (),
    },
    "execution/test_fair_shares.py": {
        "test_a_persons_urgent_run_comes_before_the_next_of_their_sweep": (),
        "test_a_second_user_gets_one_of_two_nodes_and_the_first_sees_for_whom": (),
        "test_three_people_share_two_cpus": (),
    },
    "execution/test_leaving_nodes.py": {
        "test_a_group_saves_and_shrinks_when_one_of_its_nodes_is_told_to_end": (),
        "test_a_run_whose_node_is_lost_says_so_and_the_run_on_another_node_goes_on": (),
    },
    "execution/test_lost_head.py": {
        "test_a_node_rejoins_the_next_head_and_its_run_continues_under_another_driver": (),
    },
    "execution/test_mixed_cluster.py": {
        "test_runs_land_on_their_hardware_and_nothing_is_lost_when_a_node_goes_and_comes": (),
    },
    "execution/test_nodes_apart.py": {
        "test_workers_on_nodes_without_a_common_folder_resume_bitwise_on_another": (),
    },
    "execution/test_retried_trials.py": {
        "test_a_retried_run_without_a_place_is_taken_back_and_the_other_keeps_its_attempt": (),
    },
    "execution/test_slurm.py": {
        "test_a_run_leaves_an_allocation_before_its_time_limit_and_continues_in_another": (),
    },
    "execution/test_two_nodes.py": {
        "test_an_elastic_run_trains_over_two_nodes_and_goes_on_on_the_one_that_is_left": (),
    },
    "extending/test_removal.py": {
        "test_the_rest_works_without": ("trainers/models/binary",),
    },
    "faults/test_ray_faults.py": {
        "test_a_killed_host_takes_its_drivers_along_and_others_follow": (),
        "test_a_killed_worker_of_a_group_costs_its_run_an_attempt_and_the_others_nothing": (),
    },
    "service/cli/test_cli_export_packed.py": {
        "test_the_packed_folder_of_a_run_scores_what_the_run_did": ("sign",),
    },
    "service/cli/test_cli_up.py": {
        "test_a_part_that_dies_is_named_and_takes_the_rest_down": (),
        "test_killing_up_itself_leaves_nothing_behind": (),
    },
    "service/cli/test_inspect.py": {
        "test_a_printed_spec_trains_as_it_is": ("write_sst", "write_entities"),
    },
    "trainers/checkpoints/test_kills.py": {
        "test_killed_run_ends_bitwise_where_the_whole_one_ends": ("distilled-2-fp32", "mlm-1-bf16"),
    },
    "trainers/checkpoints/test_resume.py": {
        "test_stopped_run_resumes_bitwise": ("adamw-fp32", "adan-bf16"),
        "test_run_with_split_masters_or_bf16_moments_resumes_bitwise": ("storage1",),
    },
    "trainers/distillation/test_kept_logits.py": {
        "test_kept_logits_are_those_of_each_step": ("auto-0.002",),
    },
    "trainers/distillation/test_resuming.py": {
        "test_stopped_run_resumes_bitwise": ("adan",),
    },
    "trainers/distillation/test_teacher.py": {
        "test_half_precision_answers_are_near": ("auto",),
        "test_relations_are_read_inside_a_compiled_encoder": (),
    },
    "trainers/loop/test_compile.py": {
        "test_compiled_run_has_the_losses_of_a_plain_one": ("graphs",),
    },
    "trainers/loop/test_evaluation_only.py": {
        "test_weights_halve_for_every_task_and_scores_stay": ("token_classification", "squad_v2"),
    },
    "trainers/loop/test_final_test.py": {
        "test_permuted_test_labels_change_nothing_but_test_figures": ("squad_v2",),
    },
    "trainers/loop/test_gpu_steps.py": {
        "test_a_step_of_each_task": ("classification", "squad_v2", "mlm"),
        "test_a_distilled_step": ("imdb",),
    },
    "trainers/loop/test_late_numbers.py": {
        "test_a_run_is_bitwise_the_same": ("accumulated",),
        "test_a_window_changes_no_number": ("trace_steps",),
    },
    "trainers/loop/test_not_finite.py": {
        "test_limit_ends_both_workers": ("roll_back",),
    },
    "trainers/loop/test_precision.py": {
        "test_fp16_run_resumes_bitwise_with_scale_and_masters": ("adamw-fp32", "adan-half"),
        "test_half_parameters_in_bf16_learn": ("adan-0.005",),
    },
    "trainers/loop/test_recorded_passes.py": {
        "test_replayed_passes_are_those_of_a_run_without_recordings": ("bf16", "token budget"),
        "test_rows_of_a_few_shapes_have_the_losses_of_rows_of_any": ("squad_v2",),
    },
    "trainers/models/test_binary_runs.py": {
        "test_a_resumed_run_ends_bitwise_where_the_whole_one_does": ("settings0",),
    },
    "trainers/models/test_families.py": {
        "test_it_trains_and_continues_bitwise_after_a_stop": ("roberta", "deberta-v2"),
        "test_it_trains_in_bf16": ("distilbert", "electra"),
    },
    "trainers/models/test_packed_runs.py": {
        "test_a_task_of_each_head_has_the_losses_and_scores_of_the_default": ("mlm", "squad_v2"),
        "test_a_killed_run_resumes_bitwise": ("packed-bf16", "fused-fp32"),
        "test_two_workers_have_the_losses_of_one_that_pads": ("budget", "packed, torch", "fused, deepspeed"),
        "test_a_backward_pass_in_two_parts_has_the_losses_of_one_that_pads": ("bf16",),
        "test_stages_with_dropout_resume_bitwise": ("fused",),
    },
    "trainers/parallel/test_compression.py": {
        "test_compressed_runs_learn_about_as_well": ("powersgd", "onebit"),
        "test_a_killed_run_resumes_bitwise": ("onebit",),
        "test_steps_that_overflow_are_skipped_and_leave_nothing_behind": ("powersgd",),
    },
    "trainers/parallel/test_pipeline.py": {
        "test_two_workers_have_the_loss_curve_and_scores_of_one": (
            "long-1f1b",
            "mini-interleaved",
            "mini-zero_bubble",
        ),
        "test_half_precision_follows_one_worker": ("half",),
        "test_checkpoints_are_one_model_for_any_number_of_workers": ("adan",),
    },
    "trainers/parallel/test_pipeline_deepspeed.py": {
        "test_two_stages_have_the_loss_curve_of_one_worker": ("long", "mlm"),
    },
    "trainers/parallel/test_strategies.py": {
        "test_bf16_curves_of_five_seeds_differ_by_less_than_the_seeds_do": (),
    },
    "trainers/tasks/test_squad_v2.py": {
        "test_tiny_learns_to_answer_and_when_not_to": (),
    },
    "trainers/tasks/test_tariff.py": {
        "test_tiny_learns_the_goods": (),
    },
    "trainers/telemetry/test_gradient_noise.py": {
        "test_a_resumed_run_has_the_figures_of_the_whole_run": ("accumulated",),
    },
    "trainers/telemetry/test_overhead.py": {
        "test_every_optimizer_is_warmed_up": ("optimizer0",),
    },
}
"""Slow cases by file and test; `()` leaves out all of them."""


def mark(items: Sequence[pytest.Item]) -> None:
    """Marks the cases that are left out; a case that is kept and does not exist is an error."""
    cases: dict[tuple[str, str], set[str]] = {}
    for item in items:
        file, _, test = item.nodeid.removeprefix("tests/").partition("::")
        test = test.partition("[")[0]
        if test in KEPT.get(file, {}) and isinstance(item, pytest.Function):
            case = item.callspec.id if hasattr(item, "callspec") else ""
            cases.setdefault((file, test), set()).add(case)
            if item.get_closest_marker("slow") and case not in KEPT[file][test]:
                item.add_marker("thorough")
    for (file, test), found in cases.items():
        # One case alone may be asked for on the command line.
        if len(found) > 1 and (unknown := set(KEPT[file][test]) - found):
            raise pytest.UsageError(f"tests/thorough.py: {file}::{test} has no case {sorted(unknown)}")
