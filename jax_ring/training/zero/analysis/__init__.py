"""What an optimizer computes, as far as its layout must know."""
