//! The MPI engine with processes: each test starts this binary again under `mpirun`, where it runs
//! `rank_program`.
#![cfg(feature = "mpi")]

#[allow(
    dead_code,
    reason = "shared with the tests of failures, which use more of it"
)]
mod job;
mod programs;
#[path = "../trainer/mod.rs"]
mod trainer;

use job::{connected, job, threads};

/// Runs as one rank of a job; does nothing as a test.
#[test]
fn rank_program() {
    if let Ok(case) = std::env::var(job::CASE) {
        programs::run(&case);
    }
}

#[test]
fn placements_are_those_of_local_ranks() {
    (1..=4).for_each(|ranks| job(ranks, "placements", &[]).expect_success());
}

#[test]
fn halos_are_those_of_local_ranks() {
    (1..=4).for_each(|ranks| job(ranks, "halos", &[]).expect_success());
}

#[test]
fn reductions_give_the_bits_of_local_ranks() {
    (1..=4).for_each(|ranks| job(ranks, "reductions", &[]).expect_success());
}

#[test]
fn empty_shards_are_scattered_and_gathered() {
    (1..=4).for_each(|ranks| job(ranks, "scatter_and_gather", &[]).expect_success());
}

#[test]
fn integers_and_booleans_are_those_of_local_ranks() {
    (1..=4).for_each(|ranks| job(ranks, "kinds", &[]).expect_success());
}

#[test]
fn modules_are_equal_on_all_ranks() {
    (1..=3).for_each(|ranks| job(ranks, "modules", &[]).expect_success());
}

#[test]
fn fifty_steps_of_training_give_the_bits_of_local_ranks() {
    [2, 4]
        .into_iter()
        .for_each(|ranks| job(ranks, "training", &[]).expect_success());
}

#[test]
fn models_sharded_by_a_plan_have_the_bits_of_local_ranks() {
    job(4, "parallel", &[]).expect_success();
}

/// With and without halos that travel while queries are computed.
#[test]
fn attention_has_the_bits_of_local_ranks() {
    for overlap in ["1", "0"] {
        job(4, "attention", &[("HALOCLINE_OVERLAP", overlap)]).expect_success();
    }
}

#[test]
fn training_with_gradient_checkpointing_has_the_losses_of_training_without() {
    job(2, "checkpointing", &[]).expect_success();
}

#[test]
fn payloads_of_every_form_arrive_as_they_are() {
    (1..=3).for_each(|ranks| job(ranks, "payloads", &[]).expect_success());
}

#[test]
fn many_batches_may_be_in_flight() {
    (2..=3).for_each(|ranks| job(ranks, "many_in_flight", &[]).expect_success());
}

#[test]
fn a_send_does_not_wait_for_its_receiver_nor_hold_it_up() {
    // Without single copy, messages travel in pieces, and each piece takes a call into MPI on both
    // sides.
    let no_single_copy = [("OMPI_MCA_btl_vader_single_copy_mechanism", "none")];
    job(2, "sends_do_not_wait", &[]).expect_success();
    job(2, "sends_do_not_wait", &no_single_copy).expect_success();
}

#[test]
#[ignore = "needs 12 GB of memory"]
fn a_message_may_be_larger_than_an_int_counts() {
    job(2, "large_message", &[]).expect_success();
}

#[test]
fn a_long_message_of_another_operation_leaves_the_next_alone() {
    job(2, "unexpected_in_flight", &[]).expect_success();
}

#[test]
fn a_batch_may_be_dropped() {
    (2..=3).for_each(|ranks| job(ranks, "dropped_in_flight", &[]).expect_success());
}

#[test]
fn communication_and_a_second_job_after_the_end_are_errors() {
    (1..=2).for_each(|ranks| job(ranks, "after_the_end", &[]).expect_success());
}

/// As under the `mpirun` of another MPI library, where each process would run the whole job.
#[test]
fn a_process_that_mpi_sees_alone_in_a_job_of_several_is_an_error() {
    let cause = "2 tasks were started, but MPI sees each of them alone";
    threads("placements", &[("PMI_SIZE", "2"), (job::RANKS, "2")]).expect_failure(&[cause]);
}

#[test]
fn a_panic_ends_the_job_with_its_cause() {
    let cause = "halocline: rank 2 failed: panicked: out of ocean";
    job(3, "panic", &[]).expect_failure(&[cause]);
    let cause = "halocline: rank 0 failed: panicked: out of ocean";
    job(2, "panic_while_others_compute", &[]).expect_failure(&[cause]);
}

#[test]
fn an_error_ends_the_job_with_its_cause() {
    job(3, "error", &[]).expect_failure(&["halocline: rank 2 failed: no such file"]);
}

#[test]
fn a_killed_rank_ends_the_job() {
    job(3, "killed", &[]).expect_failure(&["signal 9"]);
}

#[test]
fn a_rank_that_ends_early_is_noticed_by_one_that_waits() {
    job(3, "early_end", &[]).expect_failure(&[
        "rank 0: barrier: stopped because rank",
        "has ended its program",
    ]);
}

#[test]
fn ranks_in_different_operations_end_the_job_naming_both() {
    let checked = [("HALOCLINE_CHECK", "1")];
    job(2, "diverged", &checked).expect_failure(&[
        "ranks diverged",
        "is in with_halo",
        "is in redistribute",
    ]);
    let unchecked = [("HALOCLINE_CHECK", "0")];
    let causes = [
        "ranks diverged",
        "is in another operation",
        "HALOCLINE_CHECK=1 names it",
    ];
    job(2, "diverged", &unchecked).expect_failure(&causes);
    job(2, "other_operation", &[]).expect_failure(&causes);
}

#[test]
fn a_message_of_another_shape_ends_the_job() {
    job(2, "other_shape", &[]).expect_failure(&["ranks diverged", "the same operation, sending 1"]);
}

#[test]
fn a_silent_rank_is_a_timeout_that_names_it() {
    let causes = ["rank 0: barrier: nothing from rank 1 within 0.5 s, expected metadata"];
    job(2, "timeout", &[]).expect_failure(&causes);
}

/// The same with processes that find each other by an address.
mod by_address {
    use super::*;

    #[test]
    fn everything_is_that_of_local_ranks() {
        let cases = [
            "placements",
            "halos",
            "reductions",
            "scatter_and_gather",
            "kinds",
            "modules",
            "payloads",
            "many_in_flight",
            "dropped_in_flight",
        ];
        for case in cases {
            connected(3, case, &[]).expect_success();
        }
        connected(4, "training", &[]).expect_success();
        connected(4, "parallel", &[]).expect_success();
        connected(4, "attention", &[("HALOCLINE_OVERLAP", "1")]).expect_success();
        connected(2, "checkpointing", &[]).expect_success();
        connected(2, "sends_do_not_wait", &[]).expect_success();
        connected(1, "halos", &[]).expect_success();
        connected(1, "payloads", &[]).expect_success();
    }

    #[test]
    fn a_failure_ends_all_ranks_with_its_cause() {
        let causes = ["rank 2 failed: no such file", "(rank 0 stopped in barrier)"];
        connected(3, "error", &[]).expect_failure(&causes);
        let causes = [
            "rank 0 failed: panicked: out of ocean",
            "rank 1 did not stop within",
        ];
        connected(2, "panic_while_others_compute", &[]).expect_failure(&causes);
        connected(3, "killed", &[]).expect_failure(&["its connection broke"]);
        connected(3, "early_end", &[]).expect_failure(&["has ended its program"]);
        connected(2, "timeout", &[]).expect_failure(&["nothing from rank 1 within 0.5 s"]);
    }

    #[test]
    fn ranks_in_different_operations_are_named() {
        let unchecked = [("HALOCLINE_CHECK", "0")];
        let causes = ["ranks diverged", "is in with_halo", "is in redistribute"];
        connected(2, "diverged", &unchecked).expect_failure(&causes);
        // 12 or 16 bytes: the rank that notices first ends the job.
        connected(2, "other_shape", &[]).expect_failure(&["ranks diverged", "(sending 1"]);
    }
}
