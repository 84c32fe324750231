# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Hub folders: `hub_folder.export` creates them, `hub_folder.write_card` writes their cards, `checks.check` checks them
and `upload.push` uploads them. Importing these modules takes seconds."""
