"""The package inside other libraries; each module needs the library it is named after, and none is imported unasked."""
