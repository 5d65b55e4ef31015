"""What people ask: reports and drawings."""
