"""The control plane: sweep file, plan, ledger, Ray driver and command line."""
