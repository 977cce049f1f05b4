"""The verb `report`: writes one HTML page about a run or a checkpoint."""

from __future__ import annotations

import json
import os
from argparse import Namespace

from unified_ckpt.cli.display.progress import progress_bar
from unified_ckpt.errors import StorageError
from unified_ckpt.report.page import write_page
from unified_ckpt.report.run_data import read_report
from unified_ckpt.runtime.storage.paths import absolute_path, is_url


def run(arguments: Namespace) -> int:
    """Write the page about `arguments.path` to `arguments.output`; return 0."""
    if is_url(absolute_path(arguments.output)):
        raise StorageError(
            f"{arguments.output}: got a URL, expected the path of a local file for the page"
        )
    with progress_bar("report", "items") as advance:
        data = read_report(arguments.path, prefix=arguments.prefix, progress=advance)
    write_page(data, arguments.output)
    output = os.path.abspath(arguments.output)
    print(json.dumps({"page": output}) if arguments.json else output)
    return 0
