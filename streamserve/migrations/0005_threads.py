"""What clients name by ids of their own: rows/threads.py."""

import django.utils.timezone
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('streamserve', '0004_rows_by_time'),
    ]

    operations = [
        migrations.AddField(
            model_name='message',
            name='client_id',
            field=models.CharField(blank=True, db_default='', default='', editable=False, help_text='The id that its client has given it.', max_length=200),
        ),
        migrations.AlterField(
            model_name='message',
            name='role',
            field=models.CharField(choices=[('user', 'user'), ('assistant', 'assistant'), ('tool', 'tool')], editable=False, max_length=16, verbose_name='role'),
        ),
        migrations.CreateModel(
            name='Thread',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('tenant', models.CharField(editable=False, max_length=64)),
                ('dialect', models.CharField(editable=False, max_length=16)),
                ('client_id', models.CharField(editable=False, max_length=200)),
                ('stream_id', models.CharField(editable=False, max_length=32)),
                ('conversation_id', models.CharField(blank=True, editable=False, max_length=32)),
                ('updated_at', models.DateTimeField(db_index=True, default=django.utils.timezone.now, editable=False)),
            ],
            options={
                'default_permissions': (),
                'constraints': [models.UniqueConstraint(fields=('tenant', 'dialect', 'client_id'), name='streamserve_thread_once')],
            },
        ),
    ]
