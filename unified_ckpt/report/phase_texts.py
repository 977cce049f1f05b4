"""What a rank does in each step of a save or a load, in words for the page."""

from __future__ import annotations

from collections.abc import Mapping

PHASE_TEXTS: Mapping[str, str] = {
    "after-commit": "does what follows a commit, such as retention",
    "agree-on-encodings": "agrees on how tensors are compressed",
    "arrive": "waits until all ranks have called",
    "begin-uploads": "begins an upload for each file",
    "check-global": "checks that declarations of all nodes form whole tensors",
    "check-state": "calls state_dict(), compares copies, looks at the path",
    "check-visible": "checks that it sees the new folder",
    "clean-up": "removes what the checkpoint replaces",
    "copy": "copies tensors, so that training continues",
    "create-staging": "creates the hidden folder that is written to",
    "finalize": "writes indexes, and the manifest last",
    "finalize-copies": "writes the manifests of copies for other nodes",
    "format": "finds out the format",
    "gather-traffic": "collects what crossed the network",
    "install": "hands state to the optimizer and to objects",
    "inventory": "lists what its node has",
    "local-shardings": "finds out what its node holds",
    "match-targets": "finds the stored tensor of each target",
    "node-copies": "makes copies for other nodes",
    "nodes": "finds out which ranks share a node",
    "open": "opens the files",
    "plan": "divides the bytes among the ranks",
    "plan-copies": "divides the copies among the nodes",
    "publish": "renames the folder: from here on, the checkpoint exists",
    "read": "reads tensors and compares digests",
    "read-metadata": "reads manifest, indexes and headers",
    "select": "selects the newest complete save",
    "serve": "begins to serve its files to other nodes",
    "share-metadata": "sends manifest, indexes and headers to all ranks",
    "snapshot": "plans, and takes memory for copies",
    "sync": "waits until the disk has the bytes",
    "write": "writes tensors and computes digests",
}
