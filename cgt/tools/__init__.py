"""What people ask: reports, drawings, the doctor."""
