"""One file per op: its public function, its kernel, its plain-torch twin."""
