"""The methods of nixl_agent of NIXL 1.5.1 (nixl_cu12), by hand, for machines without it: names and arguments.

`tests/frameworks/test_nixl.py` compares them with NIXL's own, where that is installed. A star is an argument that has a
default.
"""

from __future__ import annotations

METHODS = {
    "__init__": "agent_name nixl_conf* instantiate_all*",
    "get_plugin_list": "",
    "get_plugin_mem_types": "backend",
    "get_plugin_params": "backend",
    "get_backend_mem_types": "backend",
    "get_backend_params": "backend",
    "create_backend": "backend initParams*",
    "register_memory": "reg_list mem_type* backends*",
    "deregister_memory": "dereg_list backends*",
    "query_memory": "reg_list backend mem_type*",
    "make_connection": "remote_agent backends*",
    "prep_xfer_dlist": "agent_name xfer_list mem_type* backends*",
    "estimate_xfer_cost": "req_handle",
    "make_prepped_xfer": "operation local_xfer_side local_indices remote_xfer_side remote_indices notif_msg* backends*"
    " skip_desc_merge*",
    "initialize_xfer": "operation local_descs remote_descs remote_agent notif_msg* backends*",
    "transfer": "handle notif_msg*",
    "check_xfer_state": "handle",
    "get_xfer_telemetry": "handle",
    "query_xfer_backend": "handle",
    "release_xfer_handle": "handle",
    "release_dlist_handle": "handle",
    "prep_mem_view": "dlist backends*",
    "release_mem_view": "mvh",
    "get_new_notifs": "backends*",
    "update_notifs": "backends*",
    "check_remote_xfer_done": "remote_agent_name lookup_tag backends* tag_is_prefix*",
    "send_notif": "remote_agent_name notif_msg backend*",
    "get_agent_metadata": "",
    "get_partial_agent_metadata": "descs inc_conn_info* backends*",
    "add_remote_agent": "metadata",
    "remove_remote_agent": "agent",
    "send_local_metadata": "ip_addr* port*",
    "send_partial_agent_metadata": "descs inc_conn_info* backends* ip_addr* port* label*",
    "fetch_remote_metadata": "remote_agent ip_addr* port* label*",
    "invalidate_local_metadata": "ip_addr* port*",
    "check_remote_metadata": "agent descs*",
    "get_xfer_descs": "descs mem_type*",
    "get_remote_descs": "descs mem_type*",
    "get_reg_descs": "descs mem_type*",
    "get_serialized_descs": "descs",
    "deserialize_descs": "serialized_descs",
}
CONFIG = "enable_prog_thread* enable_listen_thread* listen_port* capture_telemetry* num_threads* backends* sync_mode*"
