"""What several tests share: tiny models, inputs, fake servers, and the independent truth."""
