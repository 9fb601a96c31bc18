"""`pretrain translate`: conversion of other systems' settings files into recipes."""
