"""What an interrupted run goes on from, exactly."""
