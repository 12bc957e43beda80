"""The urls of a site that forgot to include those of streamserve."""

urlpatterns: list[object] = []
