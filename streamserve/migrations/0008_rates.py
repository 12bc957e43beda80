"""Limits over time: rows/rate_windows.py."""

import django.utils.timezone
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('streamserve', '0007_usage'),
    ]

    operations = [
        migrations.CreateModel(
            name='RateHold',
            fields=[
                ('stream_id', models.CharField(editable=False, max_length=32, primary_key=True, serialize=False)),
                ('windows', models.TextField(editable=False)),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now, editable=False)),
            ],
            options={
                'default_permissions': (),
            },
        ),
        migrations.CreateModel(
            name='RateWindow',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('subject', models.CharField(editable=False, max_length=100)),
                ('what', models.CharField(editable=False, max_length=10)),
                ('seconds', models.PositiveIntegerField(editable=False)),
                ('used', models.BigIntegerField(default=0, editable=False)),
                ('started_at', models.DateTimeField(db_index=True, default=django.utils.timezone.now, editable=False)),
            ],
            options={
                'default_permissions': (),
                'constraints': [models.UniqueConstraint(fields=('subject', 'what', 'seconds'), name='streamserve_window_once')],
            },
        ),
    ]
