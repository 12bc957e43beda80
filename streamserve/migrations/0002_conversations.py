"""Conversations: rows/conversations.py; and the models that a key may use."""

import django.db.models.deletion
import django.utils.timezone
import streamserve.rows.conversations
from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('streamserve', '0001_initial'),
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
        migrations.AddField(
            model_name='apikey',
            name='allowed_models',
            field=models.JSONField(blank=True, default=list, help_text='A list of the models and pipelines that it may use. Empty: all that its user may.', verbose_name='models'),
        ),
        migrations.CreateModel(
            name='Conversation',
            fields=[
                ('id', models.CharField(default=streamserve.rows.conversations.new_row_id, editable=False, max_length=32, primary_key=True, serialize=False)),
                ('owner', models.CharField(editable=False, max_length=64, verbose_name='owner')),
                ('tenant', models.CharField(editable=False, max_length=64, verbose_name='tenant')),
                ('title', models.CharField(blank=True, max_length=200, verbose_name='title')),
                ('titled_by', models.CharField(choices=[('words', 'first words'), ('model', 'model'), ('owner', 'owner')], default='words', editable=False, max_length=8, verbose_name='titled by')),
                ('model', models.CharField(blank=True, editable=False, max_length=200, verbose_name='model')),
                ('source', models.CharField(default='chat', editable=False, help_text='What has begun it: chat, api, …', max_length=32, verbose_name='source')),
                ('is_pinned', models.BooleanField(default=False, verbose_name='pinned')),
                ('leaf', models.CharField(blank=True, editable=False, help_text='The last message of the branch that is shown.', max_length=32)),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now, editable=False, verbose_name='created')),
                ('updated_at', models.DateTimeField(default=django.utils.timezone.now, editable=False, help_text='When its last message was begun or ended.', verbose_name='updated')),
                ('deleted_at', models.DateTimeField(editable=False, null=True, verbose_name='deleted')),
                ('user', models.ForeignKey(editable=False, null=True, on_delete=django.db.models.deletion.CASCADE, related_name='streamserve_conversations', to=settings.AUTH_USER_MODEL, verbose_name='user')),
            ],
            options={
                'verbose_name': 'conversation',
                'verbose_name_plural': 'conversations',
                'ordering': ('-updated_at', '-id'),
                'default_permissions': ('view', 'delete'),
            },
        ),
        migrations.CreateModel(
            name='Message',
            fields=[
                ('id', models.CharField(default=streamserve.rows.conversations.new_row_id, editable=False, max_length=32, primary_key=True, serialize=False)),
                ('role', models.CharField(choices=[('user', 'user'), ('assistant', 'assistant')], editable=False, max_length=16, verbose_name='role')),
                ('state', models.CharField(choices=[('running', 'running'), ('done', 'done'), ('failed', 'failed')], default='done', editable=False, max_length=8, verbose_name='state')),
                ('content', models.TextField(blank=True, editable=False)),
                ('text', models.TextField(blank=True, editable=False, help_text='What is searched: its text alone.', verbose_name='text')),
                ('stream_id', models.CharField(editable=False, max_length=32, null=True, unique=True, verbose_name='stream')),
                ('model', models.CharField(blank=True, editable=False, max_length=200, verbose_name='model')),
                ('finish_reason', models.CharField(blank=True, editable=False, max_length=32, verbose_name='finish reason')),
                ('error_code', models.CharField(blank=True, editable=False, max_length=64, verbose_name='error')),
                ('prompt_tokens', models.PositiveIntegerField(default=0, editable=False, verbose_name='prompt tokens')),
                ('cached_tokens', models.PositiveIntegerField(default=0, editable=False, verbose_name='cached tokens')),
                ('completion_tokens', models.PositiveIntegerField(default=0, editable=False, verbose_name='completion tokens')),
                ('rating', models.SmallIntegerField(choices=[(1, 'good'), (-1, 'bad')], editable=False, null=True, verbose_name='rating')),
                ('comment', models.TextField(blank=True, editable=False, verbose_name='comment')),
                ('rated_at', models.DateTimeField(editable=False, null=True, verbose_name='rated')),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now, editable=False, verbose_name='created')),
                ('finished_at', models.DateTimeField(editable=False, null=True, verbose_name='finished')),
                ('conversation', models.ForeignKey(db_index=False, editable=False, on_delete=django.db.models.deletion.CASCADE, related_name='messages', to='streamserve.conversation', verbose_name='conversation')),
                ('parent', models.ForeignKey(db_constraint=False, editable=False, null=True, on_delete=django.db.models.deletion.DO_NOTHING, related_name='children', to='streamserve.message')),
            ],
            options={
                'verbose_name': 'message',
                'verbose_name_plural': 'messages',
                'ordering': ('created_at', 'id'),
                'default_permissions': ('view',),
            },
        ),
        migrations.CreateModel(
            name='Attachment',
            fields=[
                ('id', models.CharField(default=streamserve.rows.conversations.new_row_id, editable=False, max_length=32, primary_key=True, serialize=False)),
                ('owner', models.CharField(editable=False, max_length=64, verbose_name='owner')),
                ('tenant', models.CharField(db_index=True, editable=False, max_length=64, verbose_name='tenant')),
                ('name', models.CharField(editable=False, max_length=255, verbose_name='name')),
                ('content_type', models.CharField(editable=False, max_length=100, verbose_name='type')),
                ('num_bytes', models.PositiveBigIntegerField(editable=False, verbose_name='bytes')),
                ('stored_as', models.CharField(editable=False, help_text='Its name in the storage.', max_length=255)),
                ('num_chars', models.PositiveIntegerField(default=0, editable=False, verbose_name='characters')),
                ('text', models.TextField(blank=True, editable=False)),
                ('is_ready', models.BooleanField(default=False, editable=False, help_text='Its content is stored.')),
                ('is_sent', models.BooleanField(default=False, editable=False, help_text='A question has brought it.', verbose_name='sent')),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now, editable=False, verbose_name='created')),
                ('user', models.ForeignKey(editable=False, null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='streamserve_attachments', to=settings.AUTH_USER_MODEL, verbose_name='user')),
                ('messages', models.ManyToManyField(editable=False, related_name='attachments', to='streamserve.message')),
            ],
            options={
                'verbose_name': 'attachment',
                'verbose_name_plural': 'attachments',
                'ordering': ('-created_at', '-id'),
                'default_permissions': ('view',),
            },
        ),
        migrations.CreateModel(
            name='Share',
            fields=[
                ('id', models.CharField(default=streamserve.rows.conversations.new_row_id, editable=False, max_length=32, primary_key=True, serialize=False)),
                ('leaf', models.CharField(editable=False, max_length=32)),
                ('digest', models.CharField(editable=False, max_length=64, unique=True)),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now, editable=False, verbose_name='created')),
                ('expires_at', models.DateTimeField(editable=False, null=True, verbose_name='expires')),
                ('revoked_at', models.DateTimeField(editable=False, null=True, verbose_name='revoked')),
                ('conversation', models.ForeignKey(editable=False, on_delete=django.db.models.deletion.CASCADE, related_name='shares', to='streamserve.conversation', verbose_name='conversation')),
            ],
            options={
                'verbose_name': 'share link',
                'verbose_name_plural': 'share links',
                'ordering': ('-created_at',),
                'default_permissions': ('view',),
                'permissions': (('revoke_share', "Can revoke anybody's share link"),),
            },
        ),
        migrations.AddIndex(
            model_name='conversation',
            index=models.Index(fields=['tenant', '-is_pinned', '-updated_at', '-id'], name='streamserve_conversations_of'),
        ),
        migrations.AddIndex(
            model_name='conversation',
            index=models.Index(fields=['updated_at'], name='streamserve_conversations_old'),
        ),
        migrations.AddIndex(
            model_name='message',
            index=models.Index(fields=['conversation', 'created_at', 'id'], name='streamserve_messages_of'),
        ),
        migrations.AddIndex(
            model_name='message',
            index=models.Index(condition=models.Q(('state', 'running')), fields=['state'], name='streamserve_messages_running'),
        ),
        migrations.AddIndex(
            model_name='message',
            index=models.Index(condition=models.Q(('rating__isnull', False)), fields=['-rated_at'], name='streamserve_messages_rated'),
        ),
        migrations.AddIndex(
            model_name='message',
            index=models.Index(fields=['created_at'], name='streamserve_messages_by_time'),
        ),
    ]
