"""Attribution: what heads, edges and tokens give, read off one run or its gradients."""
