"""Rules about the source that no running test can show; the tests of security and of real GPUs."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SHIPPED = sorted(
    file
    for folder in ("kvd", "client/kvd_client", "proto/kvd_proto")
    for file in (ROOT / folder).rglob("*.py")
)
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "yaml", "commands"}
CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "subprocess.getoutput"}


def rules(text: str) -> dict[str, list[str]]:
    """The tests of each rule: a rule stands before a colon at a line's begin, tests behind it."""
    entries = [entry.partition(":") for entry in re.split(r"\n(?! )", text.strip())]
    return {rule: tests.split() for rule, _, tests in entries}


# The rules of docs/security.md, each with the tests that show it.
RULES = rules(
    """
only owner and group open sockets and files: test_sockets_and_files_are_for_the_group_only
allow_users and allow_groups keep others out:
    test_a_user_who_is_not_on_the_list_is_refused_with_one_error
    test_a_list_lets_in_its_users_groups_root_and_the_daemon
a planted link redirects no file: test_a_directory_that_every_user_may_write_is_refused
    test_where_a_lock_leads_elsewhere_nothing_is_written
a planted pool is not trusted: test_a_foreign_pool_directory_is_left_alone
    test_damaged_or_foreign_pool_files_are_not_used
an adopted pool is this user's, for the same clients:
    test_a_pool_of_another_identity_is_not_adopted
    test_nothing_from_before_a_reset_is_adopted
a removal takes unused pools of this user only: test_what_is_no_pool_of_this_user_is_left_and_named
    test_a_pool_is_in_use_until_the_last_lane_of_a_dead_daemon_has_ended
a tier's files are the daemon's: test_modes test_a_directory_that_cannot_be_used_is_refused
what is no file in a tier's directory harms no other slab:
    test_what_is_no_file_costs_no_other_slab test_what_has_the_name_of_the_next_slab_delays_it
    test_a_mark_that_is_no_file_is_refused test_a_slab_that_became_a_link
requests and jobs come over Unix sockets only: test_nothing_listens_on_the_network_where_http_is_off
    test_no_request_or_job_can_come_from_the_network
HTTP reads only, under its own host names: test_nothing_can_be_changed
    test_a_foreign_host_header_is_refused test_every_interface_only_on_request_and_with_a_warning
a neighbour finds and loads no other model's chunks:
    test_a_neighbour_of_another_model_sees_neither_keys_nor_bytes
a slot's older bytes cannot be loaded: test_a_forged_job_moves_nothing
    test_bytes_that_no_store_of_the_namespace_wrote_cannot_be_loaded
names carry no escapes: test_a_name_that_cannot_be_shown_is_refused
    test_no_command_writes_a_names_escapes_to_the_terminal
keys are written nowhere: test_keys_and_tokens_are_nowhere_to_be_read
    test_damaged_objects_are_told_of_without_their_keys test_a_fault_of_a_backend_shows_no_key
    test_an_error_repeats_nothing_that_the_sender_chose
    test_a_frame_without_a_header_is_not_repeated
an engine's name belongs to its user: test_an_engine_of_another_user_cannot_be_joined

share_between_users = "no" separates users: test_users_that_do_not_share_miss_each_others_chunks
a worker sends no jobs as another: test_malformed_and_foreign_requests_get_their_error
    test_a_released_worker_is_unmapped_and_unknown
a forged job moves nothing: test_a_forged_job_moves_nothing
a chunk that is READY has no writer: test_a_chunk_is_stored_by_one_job
    test_a_chunk_that_is_stored_twice_costs_others_no_byte
leases and stores belong to an engine: test_leases_and_stores_of_another_engine_cannot_be_ended
blocks, sizes and slots are in range: test_a_job_that_does_not_fit_the_layout_is_refused
    test_a_run_outside_its_storage_or_the_arena_is_refused
    test_a_block_behind_its_storage_is_refused
sizes are checked against file and allocation: test_memory_that_is_not_as_described_is_refused
    test_the_backend_keeps_the_rule test_no_more_is_mapped_than_there_is_in
mapped memory cannot shrink: test_memory_that_could_be_shortened_is_refused
    test_memory_that_is_shared_cannot_be_shortened
clients cannot write the directory: test_the_directory_cannot_be_written_by_clients
clients cannot harm others by descriptions: test_no_client_has_the_pool_mapped_or_open
    test_a_file_that_is_harmed_under_a_daemon_costs_descriptions_only
    test_whatever_a_file_has_is_read_without_an_exception
no client has the pool: test_no_client_has_the_pool_mapped_or_open
exhausted descriptors and stores harm no others: test_sessions_work_on_without_descriptors
    test_tens_of_thousands_of_open_stores_are_given_up_at_once
a hanging file system delays only its user: test_a_file_system_that_never_answers_delays_no_session
    test_a_descriptor_that_is_never_closed_holds_up_no_other_client
    test_a_daemon_ends_when_the_file_system_answers_and_another_follows
    test_what_is_no_memory_file_is_refused_and_not_asked_for_its_size
hostile bytes end one session at most: test_what_is_no_message_ends_that_session_only
    test_random_bytes_never_crash_the_codec test_the_codec_refuses_what_is_no_message
    test_the_broker_decides_on_anything test_a_live_daemon_stands_mutated_sessions
a connection cannot be sent through itself: test_a_connection_that_is_sent_through_itself_is_refused
bytes become neither code nor objects: test_no_pickle_no_eval_no_shell
    test_the_linters_security_rules_are_on
a medium's wrong bytes are detected: test_every_wrong_record_is_found_out
    test_every_single_bit_of_a_record_counts
a hanging medium blocks nothing:
    test_a_tier_that_hangs_costs_misses_and_is_used_again_by_itself
    test_one_that_is_stuck_is_killed_and_its_slots_are_free_when_it_is_dead
keys do not leave for a shared store: test_keys_do_not_leave
dependencies are listed: test_the_table_names_what_a_daemon_and_an_engine_install
sessions: test_more_sessions_than_allowed_are_refused_with_the_setting
    test_one_user_leaves_room_for_others
    test_a_thousand_idle_connections_cost_little_and_leave_nothing
stuck closes: test_a_user_whose_file_systems_hold_threads_is_refused_until_they_answer
namespaces: test_one_model_too_many_is_refused_with_the_setting
leases: test_one_lease_too_many_pins_nothing_and_is_counted
slots on loan: test_an_engine_has_a_part_of_its_share_on_loan
    test_tables test_loans_that_were_not_used_end_where_another_engine_gets_too_few
lease_seconds, ticket_seconds: test_a_load_that_never_ends_pins_no_longer_than_a_lease
    test_a_ticket_that_is_never_used_runs_out
an engine's queue in a lane: test_a_lane_full_of_one_engines_stores_serves_the_other
quota: test_a_cap_keeps_a_flood_out_of_the_rest_of_the_pool
descriptions: test_what_is_too_long_is_counted_and_stored_without
    test_a_full_filesystem_costs_descriptions_and_no_store
chunks to and from a tier: test_bytes_on_their_way_down_are_bounded
    test_promotions_take_a_quarter_of_what_is_held_and_the_rest_waits_its_turn
messages: test_a_message_above_the_limit_is_refused_before_its_bytes_come
    test_what_is_no_message_ends_that_session_only
descriptors of a message: test_descriptors_with_another_message_end_that_session
    test_descriptors_wait_for_the_rest_of_their_message_for_a_while_only
unfinished messages, unread replies: test_unfinished_messages_of_all_together_are_bounded
    test_a_client_that_reads_no_replies_is_not_read
    test_a_crowd_of_small_messages_does_not_displace_a_large_one
descriptors of a user's unfinished messages:
    test_descriptors_of_unfinished_messages_are_bounded_by_user
    test_the_bytes_of_a_message_with_descriptors_cost_as_much_as_others
connections to a lane: test_a_new_connection_displaces_the_oldest_stranger
    test_many_connections_of_a_process_displace_its_own
registrations: test_a_layout_is_bounded
    test_a_registration_above_its_bounds_is_refused_before_it_is_looked_at
    test_a_large_registration_takes_a_turn_for_each_step
items of a list: test_an_array_above_the_documented_number_of_items_is_refused test_wrong_jobs_raise
the daemon's descriptors: test_sessions_work_on_without_descriptors
CUDA lanes: test_the_number_of_lanes_is_bounded
evictions under way: test_too_many_sweeps_at_a_time_are_refused
repeated log lines: test_what_a_client_repeats_is_written_a_hundred_times_and_then_counted
a lane's bytes: test_engines_take_turns_by_bytes test_every_engine_and_urgency_gets_its_floor
    test_a_store_moves_beside_loads_that_are_waited_for_without_end
memory that is huge but sparse: test_no_more_of_a_sparse_file_is_mapped_than_the_layout_names
    test_the_pages_that_memory_has_are_mapped_and_no_others_allocated
    test_pretouch_gives_way_to_transfers_and_ends_with_the_memory
a turn of the broker: test_a_client_that_sends_much_waits_for_one_that_sends_little
    test_a_turn_ends_when_its_time_is_up
    test_a_ping_is_answered_while_a_long_job_runs
    test_a_reset_is_answered_at_once_and_swept_in_pieces
questions: test_a_crowd_that_asks_all_the_time_gets_one_report_at_a_time
    test_a_report_shows_what_was_changed_before_it_was_asked_for
    test_of_a_peer_that_has_gone_only_what_changes_state_is_served
    test_questions_of_peers_that_have_gone_are_not_answered
metrics over HTTP: test_scrapes_in_quick_succession_share_their_metrics
"""
)

# What may go wrong on a real GPU, each with the tests that show that kvd stands it on the test
# driver, and those of `make gpu`.
HARDWARE = rules(
    """
a store before the pool is pinned is taken in part:
    test_lookups_are_answered_while_the_pool_is_pinned_anew
a driver is older than the bindings: test_a_driver_serves_or_is_named_with_the_remedy
    test_the_driver_and_its_version_are_judged
registered memory has another address for the device:
    test_memory_and_pool_are_as_a_model_says
pinning keeps others from the driver, some kernels pin little at a time:
    test_pieces_are_short_and_whole test_the_backend_keeps_the_rule
pages lie on another NUMA node than the GPU: test_the_nodes_of_gpus_are_those_that_the_kernel_names
    test_memory_lies_where_the_thread_ran_that_allocated_it
    test_each_part_of_a_pool_is_taken_from_the_node_of_its_gpu
cuMemGetAddressRange does not know virtual memory: test_no_more_is_mapped_than_there_is_in
only cuMemMap bounds what a worker claims: test_no_more_is_mapped_than_there_is_in
a storage lies in several allocations (expandable segments): test_every_rule_is_missed
    test_exported_memory_is_served_too
    test_expandable_segments_are_served_or_refused_with_the_remedy
another thread captures a CUDA graph in global mode: test_a_capture_in_another_thread_goes_on
the bindings raise for an unknown code or function: test_every_call_of_the_worker_may_fail_once
    test_no_failure_of_the_driver_or_of_torch_reaches_the_engine
    test_a_lost_device_is_a_load_and_a_store_that_fail
an engine on CUDA 12 has cuda-bindings 12.9 (make test-cuda12): test_worker_on_the_test_driver
    test_every_call_may_fail_once
a thread without a context asks about pointers: test_every_rule_is_missed
legacy IPC between users: test_an_error_names_the_users_where_they_differ
    test_memory_of_another_user_has_descriptors
    test_an_engine_of_another_user_is_served_or_told_of_both_users
memory cannot be exported: test_worker_on_the_test_driver
    test_expandable_segments_are_served_or_refused_with_the_remedy
an engine that sleeps frees its memory and wakes with other memory:
    test_an_engine_that_sleeps_has_its_memory_back_and_other_memory_when_it_wakes_up
    test_an_engine_that_sleeps_frees_its_cache_and_finds_its_chunks_again
a driver copies batches by kernels: test_every_call_may_fail_once
the exporter of memory dies in a copy: test_a_worker_killed_in_a_copy_costs_nobody_else
a driver does not close memory, or hangs in it: test_every_call_may_fail_once
    test_a_close_that_hangs_costs_that_lane_alone
a bad handle fails with 999 or 719, with its context or without:
    test_a_handle_that_the_driver_refuses_costs_its_own_engine_alone
    test_memory_that_ends_two_lanes_is_refused
the compute mode allows one process: test_a_device_without_room_for_a_second_process_is_refused
an engine's layout decides how large copies are: test_blocks_come_back_as_they_were
    test_a_block_of_all_layers_is_one_fragment test_pages_that_are_not_where_vllm_says_are_refused
"""
)


def imported(node: ast.AST) -> Iterator[str]:
    """Top-level names of the modules that a statement imports."""
    if isinstance(node, ast.Import):
        yield from (alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module.partition(".")[0]


def offences(source: str) -> list[str]:
    """What a source does that ours must not, each with its line."""
    found = []
    for node in ast.walk(ast.parse(source)):
        found += [f"{node.lineno}: {m}" for m in MODULES.intersection(imported(node))]  # type: ignore[attr-defined]  # statements have lines
        if isinstance(node, ast.Call):
            if (name := ast.unparse(node.func)) in CALLS:
                found.append(f"{node.lineno}: {name}")
            found += [
                f"{node.lineno}: shell"
                for keyword in node.keywords
                if keyword.arg == "shell" and ast.unparse(keyword.value) != "False"
            ]
    return found


def test_no_pickle_no_eval_no_shell() -> None:
    """Bytes from outside never become objects or code, and no shell sees a word of them."""
    assert len(SHIPPED) > 100
    found = {str(file.relative_to(ROOT)): offences(file.read_text()) for file in SHIPPED}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_no_request_or_job_can_come_from_the_network() -> None:
    """Our sources name no ZeroMQ endpoint but ipc://."""
    schemes = {
        found
        for file in SHIPPED
        for found in re.findall(r"\b(tcp|udp|ipc|inproc|pgm|ws)://", file.read_text())
    }
    assert schemes == {"ipc"}


def test_the_linters_security_rules_are_on() -> None:
    """All of ruff's bandit rules hold for what is shipped, but for three that are argued."""
    lint = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    assert lint["select"] == ["ALL"]
    assert {rule for rule in lint["ignore"] if rule.startswith("S")} == {"S603", "S607", "S108"}


def test_every_rule_and_trap_has_tests_that_exist() -> None:
    """Each rule of docs/security.md and each trap of hardware names tests of this repository."""
    files = (ROOT / "tests").rglob("test_*.py")
    existing = {name for file in files for name in re.findall(r"def (test_\w+)", file.read_text())}
    missing = {of: set(names) - existing for of, names in (RULES | HARDWARE).items()}
    assert {of: names for of, names in missing.items() if names} == {}
