"""Bytes between processes: what the kernel counts, and the table of runs."""

from __future__ import annotations

import socket

from benchmarks.gradient_exchange import HOOKS, received_bytes, summary


def test_received_bytes_counts_what_sockets_of_this_process_receive():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        receiver, _ = server.accept()
        with receiver:
            before = received_bytes()
            sender.sendall(bytes(12345))
            assert len(receiver.recv(12345, socket.MSG_WAITALL)) == 12345
            assert received_bytes() - before == 12345


def test_summary_compares_runs_of_the_same_seed():
    rows = [
        {"processes": 2, "hook": name, "received_bytes": 2048, "train_loss": seed + shift, "test_accuracy": 1}
        for name, shift in zip(HOOKS, range(len(HOOKS)), strict=True)
        for seed in (0, 7)
    ]
    table = summary(rows)
    assert [line["train_loss, difference"] for line in table] == [f"+{n:.4f} ± 0.0000" for n in range(len(HOOKS))]
    assert table[0]["KiB a step"] == 2.0 and table[1]["train_loss"] == "4.5000"
